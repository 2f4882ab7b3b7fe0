"""Pipeline strategies: the workers hold stages of the model."""
