"""Predicted memory and traffic: from the shapes of a model and a configuration, without weights, ranks or an engine."""
