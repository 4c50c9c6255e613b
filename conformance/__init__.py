"""torch's own tests of its RPC, run from the installed torch against gradwire.

    python -m conformance                      all of them, compared with what is expected
    python -m conformance rref -k to_here      those of a class, or with words in their name
    python -m conformance --plain-torch        against torch itself, to check the runner

`suite` says which tests there are, `running` runs them, `expectations` knows what differs and why.
"""
