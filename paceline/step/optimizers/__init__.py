"""What a script gives as its optimizer, and several optimizers as one."""
