"""From values to bytes and back. Pure: no sockets, threads or clocks."""
