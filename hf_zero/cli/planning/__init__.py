"""What `hf-zero plan` asks and tells: what fits, how long a step takes, long sequences, layers that ranks share, pictures."""
