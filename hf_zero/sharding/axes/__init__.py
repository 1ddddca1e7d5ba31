"""Models shared by other axes than data: layers cut over ranks, experts placed on them."""
