"""Loading: time, memory and bytes read of `from_pretrained`, beside other libraries."""
