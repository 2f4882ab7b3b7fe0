"""How a model is cut into stages."""
