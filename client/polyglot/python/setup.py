"""Makes the stubs from the contract whenever the package is built or installed.

`proto` is a link to the contract; a source distribution has a copy in its place.
"""

import re
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc
from setuptools import setup

CONTRACT = "fencepost/v1/lock_service.proto"

Path("src/fencepost/v1").mkdir(parents=True, exist_ok=True)
Path("src/fencepost/v1/__init__.py").write_text('"""The contract, as generated from its proto file."""\n')
arguments = ["protoc", "-Iproto", f"-I{files('grpc_tools') / '_proto'}"]
arguments += ["--python_out=src", "--pyi_out=src", "--grpc_python_out=src", CONTRACT]
if protoc.main(arguments) != 0:
    raise SystemExit(f"protoc cannot compile {CONTRACT}")


def made_with(file: str, pattern: str) -> str:
    return re.search(pattern, Path("src/fencepost/v1", file).read_text()).group(1)


# The generated code refuses libraries that are older than what it was made with.
setup(
    install_requires=[
        "grpcio>=" + made_with("lock_service_pb2_grpc.py", r"GRPC_GENERATED_VERSION = '(.+)'"),
        "protobuf>=" + made_with("lock_service_pb2.py", r"Protobuf Python Version: (\S+)"),
        "googleapis-common-protos>=1.63",
    ]
)
