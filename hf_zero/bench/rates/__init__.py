"""What `hf-zero plan --measure` needs to know of this machine: one block's time, exchanges, an optimizer's step."""
