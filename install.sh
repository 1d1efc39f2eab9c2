#!/usr/bin/env bash
# install.sh: installs what llm.cu is built from, with apt, on Debian 12 or newer and Ubuntu 22.04 or newer.
#
#   ./install.sh          what `make` and `make test` need
#   ./install.sh --dev    also what `make fuzz`, `make format` and clangd need
#
# As root or with sudo; does nothing where everything is there. CUDA is NVIDIA's to install, and optional: without it
# everything runs on the CPU (https://developer.nvidia.com/cuda-downloads, version 12 or newer). `make doctor` shows the rest.
set -euo pipefail

packages=(
    g++ make
    libboost-context-dev    # fibers: the threads of a block on the CPU
    catch2                  # tests
    libcli11-dev            # command line
    libjsoncpp-dev          # JSON
    libstb-dev              # PNG
    libpcre2-dev            # the patterns of tokenizers
    libutf8proc-dev         # the normal forms of Unicode, for tokenizers
    libcpp-httplib-dev pkg-config  # generate --serve
    libopenmpi-dev openmpi-bin  # ranks as processes (mpirun)
    gdb                     # to step through kernels
    ccache                  # what was compiled before is not compiled again
    python3                 # the tests that compare runs and read the sources
)
for argument in "$@"; do
    case $argument in
        --dev) packages+=(clang clang-format clangd) ;;
        *)
            sed -n '2,8s/^# \?//p' "$0"
            [ "$argument" = --help ] && exit 0
            exit 2 ;;
    esac
done

if ! command -v apt-get > /dev/null; then
    cat >&2 <<'END'
install.sh: this system has no apt. What llm.cu needs, under the names of other package managers (untested):

  Fedora  sudo dnf install gcc-c++ make boost-devel catch-devel cli11-devel jsoncpp-devel stb-devel pcre2-devel utf8proc-devel cpp-httplib-devel pkgconf openmpi-devel gdb ccache python3
  Arch    sudo pacman -S gcc make boost catch2 cli11 jsoncpp stb pcre2 libutf8proc cpp-httplib pkgconf openmpi gdb ccache python
  macOS   brew install gcc make boost catch2 cli11 jsoncpp pcre2 utf8proc cpp-httplib pkgconf open-mpi ccache   and stb's headers as stb/*.h
          (then gmake CXX=g++-14, or the version that brew gives)

That is a compiler with C++20 and OpenMP, GNU make, Boost.Context, Catch2, CLI11, JsonCpp, stb, PCRE2, utf8proc,
and (optional) OpenMPI and cpp-httplib. `make doctor` tells which of them are found.
END
    exit 1
fi

missing=()
for package in "${packages[@]}"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2> /dev/null)" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} = 0 ]; then
    echo "install.sh: everything is installed. Next: make"
    exit 0
fi

as_root=()
if [ "$(id -u)" != 0 ]; then
    if ! command -v sudo > /dev/null; then
        echo "install.sh: run as root, or install sudo. What to install: apt-get install ${missing[*]}" >&2
        exit 1
    fi
    as_root=(sudo)
fi
apt() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 "$@" < /dev/null; }

echo "install.sh: installing ${missing[*]}"
apt update || echo "install.sh: apt-get update failed; trying with the package lists that are here" >&2
# Where libFuzzer is a package of its own.
if [[ " ${packages[*]} " == *" clang "* ]] && apt-cache show libclang-rt-dev > /dev/null 2>&1; then missing+=(libclang-rt-dev); fi
if ! apt install --no-install-recommends --yes "${missing[@]}"; then
    echo "install.sh: apt could not install them. They are in Debian 12 and in Ubuntu 22.04's 'universe'" >&2
    echo "            (sudo add-apt-repository universe), or newer." >&2
    exit 1
fi
echo "install.sh: done. Next: make"
