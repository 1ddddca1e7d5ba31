"""Which ranks exchange with which, and how: process groups, axes, and the choice of an exchange."""
