"""Memory on disk for what does not fit: scratch files, and the threads that read and write them beside the computation."""
