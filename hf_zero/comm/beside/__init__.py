"""What processes tell each other beside the exchanges, where not all of them take part: threads, sockets and torch's store.

`store` is what ranks leave for each other where exchanges fail; `roll_call` asks it who has come to an agreement, and `watch`
who has come to an exchange that is stuck on a device. `service` answers questions of one process whatever the other one's
program does, and `progress` tells whether that one may still come to where this one is.
"""
