"""Remote references (RRefs): a value stays on one worker, and other workers refer to it."""
