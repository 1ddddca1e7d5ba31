"""Where the values of a unit lie: on the device, on the host, as second copies, and for how long."""
