"""dev/script.py: what the Python scripts of this folder share: how they are asked, refuse and end.
"""
import os
import re
import signal
import sys


def end_on_signals():
    """Ctrl-C and SIGTERM end the script without a traceback, and what is temporary is removed on the way out."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: sys.exit(128 + n))


def show_usage(text):
    """Ends a script that was asked for --help, or got arguments that it does not take."""
    print(text.strip())
    sys.exit(0 if sys.argv[1:] == ['--help'] else 2)


def refuse(why):
    """Ends a script that cannot do what it is asked for."""
    print(f'{os.path.basename(sys.argv[0])}: {why}', file=sys.stderr)
    sys.exit(2)


def whole_number(name, text):
    """The value of an environment variable, at least 1."""
    if not re.fullmatch(r'0*[1-9]\d*', text):
        refuse(f'{name}={text}: give whole numbers of at least 1')
    return int(text)
