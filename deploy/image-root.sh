#!/bin/sh
# Makes the root of an image without a distribution: the programs in /usr/bin,
# the shared libraries that they name where they name them, the little that the C
# library reads, and the public roots that `sslrootcert=system` and clients without
# `--tls-ca` trust.
#
#   image-root.sh DIRECTORY PROGRAM...
set -eu

root=$1
shift

roots=/etc/ssl/certs/ca-certificates.crt
mkdir -p "$root/usr/bin" "$root${roots%/*}"
cp -L "$roots" "$root$roots"
for program do
    cp "$program" "$root/usr/bin/"
    libraries=$(ldd "$program")
    case $libraries in
    *'not found'*)
        printf 'image-root: %s\n' "$libraries" >&2
        exit 1
        ;;
    esac
    # "libc.so.6 => /lib/….so.6 (0x…)", and the loader without an arrow.
    printf '%s\n' "$libraries" | sed -n 's|^[^/]*\(/[^ ]*\) (0x.*|\1|p' | while read -r library; do
        mkdir -p "$root${library%/*}"
        cp -L "$library" "$root$library"
    done
done
printf 'hosts: files dns\n' >"$root/etc/nsswitch.conf"
printf 'fencepost:x:65532:65532::/:/\n' >"$root/etc/passwd"
printf 'fencepost:x:65532:\n' >"$root/etc/group"
