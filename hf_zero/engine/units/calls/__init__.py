"""What happens while a unit is called: its values, what autograd saves of it, what is written to it."""
