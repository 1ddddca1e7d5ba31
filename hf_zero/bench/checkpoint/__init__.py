"""Checkpoints: time and memory to save, load and export, and how long a save in the background holds training up."""
