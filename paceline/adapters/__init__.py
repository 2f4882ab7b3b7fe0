"""Objects of other libraries as Paceline's own: Keras models, Lightning modules, trackers."""
