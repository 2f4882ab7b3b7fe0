"""Data sets in Parquet files, and writers for tables of data engines (Ray, Spark)."""
