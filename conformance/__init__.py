"""torch's own tests of its RPC, run from the installed torch against gradwire.

    python -m conformance                      all of them, compared with what is expected
    python -m conformance RpcTest -k rref      those of a class, with a word in their name
    python -m conformance --third              a third of them
    python -m conformance --plain-torch        against torch itself, to check the runner

`suite` says which tests there are, `running` runs them, `expectations` knows what differs and why.
"""
