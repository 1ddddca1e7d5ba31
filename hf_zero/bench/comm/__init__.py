"""Exchanges: every implementation on this machine, at several sizes."""
