"""Start workers somewhere, watch them, and say why they ended. Nothing here imports torch."""
