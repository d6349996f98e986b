#!/usr/bin/env python3
"""Makes a container in an Azurite that runs on this machine. Usage: azurite-container.py NAME"""

import base64
import datetime
import hashlib
import hmac
import sys
import urllib.error
import urllib.request

# The account of all emulators, which is no secret: Microsoft documents it.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
HOST = "127.0.0.1:10000"


def main() -> None:
    """Sends one signed request; a container that is there already is as good."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    name = sys.argv[1]
    now = datetime.datetime.now(datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": now, "x-ms-version": "2021-12-02"}
    signed = "\n".join(f"{key}:{value}" for key, value in sorted(headers.items()))
    resource = f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    text = "PUT" + "\n" * 12 + f"{signed}\n{resource}"
    digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    url = f"http://{HOST}/{ACCOUNT}/{name}?restype=container"
    headers["Content-Length"] = "0"
    request = urllib.request.Request(url, method="PUT", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            print(answer.status)
    except urllib.error.HTTPError as error:
        if error.code != 409:
            sys.exit(f"{error.code}: {error.read().decode()}")


if __name__ == "__main__":
    main()
