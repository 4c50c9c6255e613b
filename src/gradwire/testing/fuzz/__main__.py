import sys

from gradwire.testing.fuzz.command import main

if __name__ == "__main__":
    sys.exit(main())
