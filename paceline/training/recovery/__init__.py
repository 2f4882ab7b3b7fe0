"""Recovery of a worker's training after losses, joins and notices."""
