"""The engine: partitions, gathers and reduces the parameters of any `nn.Module`; it knows torch only."""
