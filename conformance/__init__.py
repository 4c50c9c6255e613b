"""Run torch's own tests of its RPC, from the installed torch, on gradwire.

    python -m conformance                      all tests
    python -m conformance RpcTest -k rref      the tests of a class with a word in their names
    python -m conformance --third              a third of the tests
    python -m conformance --plain-torch        on torch itself, to check the runner

    python -m conformance.libraries tests.py   a library's own tests, on torch and on gradwire

`suite` selects the tests, `running` runs them, `expectations` lists the tests that gradwire does
not pass, with the reasons.
"""
