"""What the host does for a layer: calls of functions, counted, so that a busy machine changes nothing."""
