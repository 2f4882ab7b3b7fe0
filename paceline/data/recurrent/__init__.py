"""Recurrent models: long sequences as rows, and state carried from batch to batch."""
