"""Optimizer states elsewhere than on the device: on a disk, or in host memory. A step goes through them in chunks.

From a disk, one chunk is read while another is stepped on and a third is written; in between, users read `optimizer.state` as
tensors over mapped files (the files themselves are `hf_zero.host.scratch`). In host memory beside a device, what has been
stepped on goes up while the next chunk is. The optimizer's own code runs on each chunk, so its class must not mind: that is
tried first, on tiny parameters.
"""
