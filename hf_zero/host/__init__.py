"""What a process takes of the host beside a device: `memory` that is locked, `cores` for its steps, and `scratch`, files in the
place of memory."""
