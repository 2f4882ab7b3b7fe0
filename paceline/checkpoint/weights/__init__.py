"""The weights of a model as they enter and leave training: complete, by the names of its ``state_dict``."""
