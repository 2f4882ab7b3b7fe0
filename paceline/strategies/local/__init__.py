"""Local training: replicas of the model that train on their own and are averaged periodically."""
