"""From partitioned parameters to files."""
