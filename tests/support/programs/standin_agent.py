"""What the tests of dialling start in an agent's place: it tells what it was given, and does as that says.

``job`` of what it is given is a named pipe, to be told by; ``owner`` is what to do then. Needs nothing but Python.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys

if sys.argv[1:2] == ["--bootstrap"]:
    word = sys.argv[2]
    text = base64.urlsafe_b64decode(word + "=" * (-len(word) % 4)).decode()
else:
    text = sys.stdin.readline().strip()
given = json.loads(text)
do = given["owner"]
if do == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
pid = os.getpid()
if do == "leave one of the group":
    nowhere = subprocess.DEVNULL
    pid = subprocess.Popen(["sleep", "3600"], stdin=nowhere, stdout=nowhere, stderr=nowhere).pid
with open(given["job"], "a") as pipe:
    pipe.write(json.dumps({"given": text, "pid": pid}) + "\n")

if do.startswith("exit "):
    sys.exit(int(do.split()[1]))
elif do.startswith("say "):
    sys.exit(do.removeprefix("say "))
elif do == "chatter":
    for number in range(20000):
        print("line", number, file=sys.stderr)
    sys.exit("the last line")
elif do == "leave":  # somebody who holds the standard error for as long as the input lasts
    subprocess.Popen(["cat"], stdout=subprocess.DEVNULL, start_new_session=True)
    sys.exit("gone before its child")
elif do == "leave one of the group":
    pass
elif sys.argv[1:2] == ["--bootstrap"]:  # there may be no input
    signal.pause()
else:
    sys.stdin.read()
