"""For all tests: this folder on the import path, for what several kinds share; and Ctrl-C is heard."""

import signal

# A shell starts background jobs deaf to SIGINT, and what tests start inherits that: elasticrun would stay deaf, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
