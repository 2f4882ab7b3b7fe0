"""Recurrent models: long sequences as rows, and the state that goes from batch to batch."""
