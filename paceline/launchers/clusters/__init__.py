"""Places that give a run its machines: one file each, behind the seam of ``base.py``."""
