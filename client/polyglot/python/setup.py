"""Makes the stubs from the contract whenever the package is built or installed.

`proto` is a link to the contract; a source distribution has a copy in its place.
"""

from importlib.metadata import version
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

# The generated code refuses libraries that are older than what it was generated with.
setup(
    install_requires=[
        f"grpcio>={version('grpcio-tools')}",
        f"protobuf>={version('protobuf')}",
        "googleapis-common-protos>=1.63",
    ]
)
