"""dev/script.py: what the Python scripts of this folder share: how they are asked, read files, run commands, refuse and
end.
"""
import os
import re
import signal
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def read(path):
    """The text of a file of the repository."""
    with open(os.path.join(ROOT, path), encoding='utf-8') as file:
        return file.read()


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


def output_of(command, **options):
    """What a command prints, run in the repository's root; RuntimeError if it fails."""
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, stdin=subprocess.DEVNULL, **options)
    if done.returncode != 0:
        line = ' '.join(command).splitlines()[0]  # of a script in the command
        raise RuntimeError(f'exit status {done.returncode} of {line}: {(done.stderr or done.stdout).strip()[-400:]}')
    return done.stdout
