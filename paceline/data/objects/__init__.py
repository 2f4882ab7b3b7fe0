"""Values in the objects of a script: snapshot, comparison, restore, and tracking of changes by the loop."""
