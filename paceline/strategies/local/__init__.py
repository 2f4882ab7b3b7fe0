"""Local training: replicas of the model that train on their own and meet every so many steps."""
