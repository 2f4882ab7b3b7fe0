"""Tables: samples in Parquet files, and what engines write to them."""
