"""Training as one worker takes it: from step to step, through losses, joins and notices."""
