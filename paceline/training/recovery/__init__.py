"""In a worker: go on after losses, joins and notices."""
