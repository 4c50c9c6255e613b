"""Calls between workers: sending, serving, connections, threads, failures.

This layer moves messages and runs functions; the layers above register a handler for each kind of
message they understand, and interceptors that see user calls. `agent.Agent` puts the parts
together. Where new features belong:

- **profiling and tracing** of remote calls: an `interceptors.Interceptor`, which sees each call on
  both sides and can attach data to the messages;
- **metrics**: `metrics.Metrics`;
- **device maps**: `wire.tensors` encodes the tensors, `options.Options.device_maps` has the maps,
  and `function_calls` knows the peer that a call is encoded for;
- **TLS**: in the layer below, `transport`: a `Stream` that encrypts the bytes of the same frames.
"""
