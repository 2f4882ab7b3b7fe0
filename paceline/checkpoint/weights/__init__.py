"""Complete weights of a model at the start and the end of training, by the names of its ``state_dict``."""
