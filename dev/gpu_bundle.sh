#!/usr/bin/env bash
# dev/gpu_bundle.sh FOLDER: collects, on a machine where everything is installed, what a GPU machine without a network
# may lack: header libraries, CUPTI, and Open MPI. `make` uses the folder where the system has none of its own.     make gpu-bundle
#
#   FOLDER/include   CLI11, JsonCpp, stb, PCRE2, utf8proc, cpp-httplib, Catch2 (version 2, or 3 with its library)
#   FOLDER/lib       the static libraries of PCRE2, utf8proc and Catch2 3; JsonCpp and cpp-httplib, which are shared ones,
#                    with what they need; httplib.flags, the macros that cpp-httplib was compiled with
#   FOLDER/cupti     the profiler's interface, for make profile
#   FOLDER/mpi       mpirun, its libraries, plugins and headers; `source FOLDER/mpi/use.sh` sets the paths
#
# The folder must stay under 60 MB; git ignores it. The GPU machine needs the same processor family and a C library that is
# not older than this machine's.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${CXX:=g++}" "${CUDA_HOME:=/usr/local/cuda}"
. dev/script.sh dev/gpu_bundle.sh "$@"
folder=$1
part=$folder.part
rm -rf "$part"
mkdir -p "$part/include"
die() {
    echo "gpu-bundle: $*" >&2
    rm -rf "$part"
    exit 1
}

# Where the compiler finds a header, without the bundle.
path_of() { $CXX -x c++ -std=c++20 -idirafter /usr/include/jsoncpp -M -include "$1" /dev/null 2> /dev/null | tr ' \\' '\n\n' | grep -m 1 "/$1\$" || true; }
# static_library NAME
static_library() {
    local path
    path=$($CXX -print-file-name="lib$1.a")
    [ -e "$path" ] || die "no lib$1.a here"
    mkdir -p "$part/lib" && cp -L "$path" "$part/lib/"
}
# Libraries that every system has, and those of the C compiler, are not copied.
needed_by() {
    ldd "$@" 2> /dev/null | awk '$3 ~ /^\// { print $3 }' | sort -u |
        grep -vE '/(libc|libm|libdl|librt|libpthread|libutil|libresolv|libgcc_s|libstdc\+\+|ld-linux[^/]*|libnss[^/]*)\.so'
}
# shared_library NAME: it, and what it needs
shared_library() {
    local path name library
    path=$($CXX -print-file-name="lib$1.so")
    [ -e "$path" ] || die "no lib$1.so here"
    name=$(objdump -p "$path" | awk '/SONAME/ { print $2 }')
    mkdir -p "$part/lib" && cp -L "$path" "$part/lib/$name" && ln -sf "$name" "$part/lib/lib$1.so"
    for library in $(needed_by "$path"); do cp -L "$library" "$part/lib/"; done
}
# header_library HEADER FOLDER: copies the folder that HEADER lies in
header_library() {
    local path
    path=$(path_of "$1")
    [ -n "$path" ] || die "no <$1> here: ./install.sh first"
    cp -rL "${path%/"$1"}/$2" "$part/include/"
}
header_library CLI/CLI.hpp CLI
header_library json/json.h json
shared_library jsoncpp
header_library stb/stb_image_write.h stb
header_library pcre2.h pcre2.h
static_library pcre2-8
header_library utf8proc.h utf8proc.h
static_library utf8proc
# With the headers of OpenSSL, zlib and Brotli, where it was compiled with them.
if pkg-config --exists cpp-httplib 2> /dev/null; then
    shared_library cpp-httplib
    pkg-config --cflags-only-other cpp-httplib > "$part/lib/httplib.flags"
    # shellcheck disable=SC2046
    for header in $($CXX -x c++ -std=c++20 $(cat "$part/lib/httplib.flags") -M -include httplib.h /dev/null |
        tr ' \\' '\n\n' | grep -E '/(httplib\.h|openssl/.*|zlib\.h|zconf\.h|brotli/.*)$'); do
        relative=${header#*/include/}
        relative=${relative#*-linux-gnu/}
        mkdir -p "$(dirname "$part/include/$relative")" && cp -L "$header" "$part/include/$relative"
    done
else
    echo "gpu-bundle: pkg-config finds no cpp-httplib: the GPU machine's generate will have no --serve"
fi
if [ -n "$(path_of catch2/catch_all.hpp)" ]; then
    header_library catch2/catch_all.hpp catch2
    static_library Catch2
else
    header_library catch2/catch.hpp catch2
fi

for cuda in "$CUDA_HOME/extras/CUPTI" "$CUDA_HOME"; do
    [ -e "$cuda/include/cupti.h" ] || continue
    mkdir -p "$part/cupti/include" "$part/cupti/lib"
    cp -L "$cuda"/include/*cupti*.h "$cuda"/include/generated_*.h "$part/cupti/include/" 2> /dev/null || true
    cp -L "$cuda"/lib64/libcupti.so "$part/cupti/lib/libcupti.so"
    ln -s libcupti.so "$part/cupti/lib/$(objdump -p "$part/cupti/lib/libcupti.so" | awk '/SONAME/ { print $2 }')"
    break
done
[ -d "$part/cupti" ] || echo "gpu-bundle: no CUPTI in $CUDA_HOME: make profile will need the GPU machine's"

# Open MPI 4 finds its parts under OPAL_PREFIX. Version 5 starts processes by programs and libraries of other names.
if command -v mpirun > /dev/null && mpirun --version 2> /dev/null | head -n 1 | grep -q 'Open MPI) 4\.'; then
    mpi=$part/mpi
    home=$(dirname "$(dirname "$(readlink -f "$(command -v mpirun)")")")           # /usr
    libraries=$(dirname "$(ldd "$(readlink -f "$(command -v mpirun)")" | awk '/libopen-rte/ { print $3 }')")
    libraries=$(readlink -f "$libraries")                                          # /usr/lib/x86_64-linux-gnu
    relative=${libraries#"$home"/}
    mkdir -p "$mpi/bin" "$mpi/$relative" "$mpi/share"
    for program in orterun orted mpirun mpicxx.openmpi mpic++.openmpi opal_wrapper; do
        [ -e "$home/bin/$program" ] && cp -L "$home/bin/$program" "$mpi/bin/"
    done
    cp -rL "$home/share/openmpi" "$mpi/share/"
    cp -rL "$libraries/openmpi" "$mpi/$relative/"
    rm -rf "$mpi/$relative"/openmpi/lib/fortran "$mpi/$relative"/openmpi/include/*.mod
    # Plugins for networks that only clusters have would pull in their drivers.
    find "$mpi/$relative/openmpi" -name 'mca_*' | grep -E 'ucx|ofi|psm|openib|usnic|uct|portals|ugni|lustre|pvfs|_lsf' | xargs -r rm -f
    # Debian's Open MPI uses PMIx, which has plugins of its own.
    if [ -d "$libraries/pmix2" ]; then cp -rL "$libraries/pmix2" "$mpi/$relative/" && rm -f "$mpi/$relative"/pmix2/lib/libpmix.so*; fi
    find "$mpi" -name '*.a' -delete
    for share in "$home"/share/pmix*; do [ -d "$share" ] && cp -rL "$share" "$mpi/share/"; done
    # shellcheck disable=SC2046
    needed=$(needed_by $(find "$mpi" -type f \( -name '*.so*' -o -path '*/bin/*' \)) "$libraries/libmpi.so.40")
    for library in $needed "$libraries"/libmpi.so.40; do cp -L "$library" "$mpi/$relative/"; done
    cat > "$mpi/use.sh" <<END
# source this file: Open MPI from this folder
mpi=\$(cd "\$(dirname "\${BASH_SOURCE[0]}")" && pwd)
export OPAL_PREFIX=\$mpi PMIX_PREFIX=\$mpi PATH=\$mpi/bin:\$PATH
export LD_LIBRARY_PATH=\$mpi/$relative:\$mpi/$relative/openmpi/lib\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
export OMPI_MCA_mca_base_component_path=\$mpi/$relative/openmpi/lib/openmpi3:\$mpi/$relative/openmpi/lib/openmpi
export PMIX_MCA_mca_base_component_path=\$mpi/$relative/pmix2/lib/pmix
END
else
    echo "gpu-bundle: no Open MPI 4 here (apt install openmpi-bin libopenmpi-dev; version 5 is left out): the ranks of the GPU machine will be threads only"
fi

kilobytes=$(du -sk "$part" | cut -f 1)
[ "$kilobytes" -lt 60000 ] || die "the folder would have $kilobytes KiB, more than 60 MB"
rm -rf "$folder"
mv "$part" "$folder"
echo "gpu-bundle: $folder, $((kilobytes / 1024)) MiB"
du -sh "$folder"/* | sed 's/^/  /'
