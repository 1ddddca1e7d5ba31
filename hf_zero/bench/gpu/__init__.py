"""The first run on a machine's accelerators, `hf-zero doctor --gpu`: parts in processes of their own, and one page."""
