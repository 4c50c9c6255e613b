"""Transports: they move frames between workers, and know nothing of what the frames mean.

| file | what it does |
|---|---|
| `base` | the interface of transports, listeners and connections |
| `registry` | makes transports by name |
| `in_process`, `unix`, `tcp` | the three transports |
| `stream` | connections over a byte stream, for `unix` and `tcp` |
| `framing` | how frames are laid out in a byte stream |
| `listener` | accepts clients, for `unix` and `tcp` |
| `handshake` | mutual authentication of client and listener |
| `pipes` | two pipes used like a socket, for `unix` |
| `shared_memory` | segments of shared memory that carry large tensors, for `unix` |
| `memcopy` | fast copies of much memory |
| `receive_buffers` | memory for large tensors that arrive through a stream |
| `poller` | waits for the events of all connections of a worker |
| `read_token` | lets one thread at a time read a connection |
| `spin` | polls for a short time before a thread sleeps |

There is no TLS yet. To add it, write a transport `tls` like `tcp`, whose `Stream` (see `stream`) is
a socket wrapped by Python's module ssl. On the listening side, the method
`StreamListener._start_handshake` would wrap each accepted socket. On the client's side, the method
`TcpTransport.connect` would wrap the socket right after connecting. The handshake of this package
would stay as it is, and TLS would encrypt it. The stream would need the method `recv` for that
handshake, and would have to raise BlockingIOError in place of ssl's own exceptions. Its `recv_into`
would have to return all bytes that ssl has decrypted, up to the size of the buffer, because the
poller notices only bytes that are still in the socket.
"""
