#!/bin/sh
# Makes a folder with `python`, which runs as on ARM64: by qemu, with Debian's Python, the libraries that the engine's
# tests import, and the torch of requirements.txt. It is SPECDEMO_ARM, else specdemo-arm in the user's cache folder,
# and takes 2 GB. This needs Debian on x86. `QEMU_CPU` names the CPU.

set -eu
folder=${SPECDEMO_ARM:-${XDG_CACHE_HOME:-$HOME/.cache}/specdemo-arm}
source=$(cd "$(dirname "$0")/../.." && pwd)
triplet=aarch64-linux-gnu

for tool in qemu-aarch64:qemu-user $triplet-gcc:gcc-$triplet apt-get:apt dpkg:dpkg; do
    command -v "${tool%:*}" > /dev/null || { echo "There is no ${tool%:*}: apt-get install ${tool#*:}." >&2; exit 1; }
done
python3 -m pip --version > /dev/null 2>&1 || { echo "python3 here has no pip." >&2; exit 1; }

wanted=$(cat "$0" "$source/requirements.txt" "$source/tests/requirements.txt" | sha256sum)
[ "$(cat "$folder/made-of" 2> /dev/null)" = "$wanted" ] && exit
rm -rf "$folder"
mkdir -p "$folder/apt/lists/partial" "$folder/apt/archives/partial" "$folder/root/proc"
folder=$(cd "$folder" && pwd)
root=$folder/root packages=$folder/packages

# Its own lists and status: this machine's packages stay as they are, and nobody needs to be root.
apt() {
    apt-get -qq -o APT::Architecture=arm64 -o Dir::State="$folder/apt" -o Dir::State::status=/dev/null \
        -o Dir::Cache="$folder/apt" -o Debug::NoLocking=1 "$@"
}
apt update
apt -y --no-install-recommends --download-only install python3 libstdc++6
for file in "$folder"/apt/archives/*.deb; do dpkg -x "$file" "$root"; done
rm -r "$folder/apt"

# pip takes this machine's kind for ARM's where a package says what it needs, so torch comes without what it needs.
version=$(cd "$root/usr/bin" && echo python3.*[0-9])
install() {
    python3 -m pip install -q --target "$packages" --only-binary=:all: --implementation cp \
        --python-version "${version#python}" $platforms "$@"
}
platforms="--platform manylinux2014_aarch64"
for minor in $(seq 17 36); do platforms="$platforms --platform manylinux_2_${minor}_aarch64"; done
listed() { grep -hE "^($1)\b" "$source/requirements.txt" "$source/tests/requirements.txt"; }
install --no-deps $(listed 'torch|accelerate')
listed 'transformers|pydantic|typer|safetensors|gguf|filelock|numpy|scipy|psutil|tqdm' > "$folder/listed"
listed 'pytest|hypothesis|tokenizers|llguidance' >> "$folder/listed"
install -r "$folder/listed" httpx sympy networkx jinja2 setuptools  # torch's, but for httpx, which is gradio's

# This torch is built for CUDA, of which nothing is used but the names: its functions do nothing, and say
# that there is no device.
$triplet-nm -D --undefined-only "$packages"/torch/lib/*.so | awk '$1 == "U" && $2 ~ /^(__)?(cu|nccl|nv)/ { print $2 }' |
    sort -u > "$folder/names"
awk -F@ '{ print ".globl " $1 "\n.type " $1 ", %function" }
    $1 != "cudaGetDeviceCount" { print $1 ":" }
    END { print "mov x0, #0\nret\ncudaGetDeviceCount: mov w0, #100\nret" }' "$folder/names" > "$folder/none.s"
awk -F@ 'NF > 1 { names[$NF] = names[$NF] $1 ";" } END { for (i in names) print i " {" names[i] "};" }' \
    "$folder/names" > "$folder/none.map"
$triplet-gcc -shared -nostdlib -Wl,--version-script="$folder/none.map" "$folder/none.s" -o "$packages/torch/lib/none.so"
for file in "$packages"/torch/lib/*.so; do $triplet-readelf -d "$file"; done |
    sed -nE 's/.*\[(lib(cu|nccl|nv).*)\]/\1/p' | sort -u | while read -r name; do
        [ -e "$packages/torch/lib/$name" ] || ln -s none.so "$packages/torch/lib/$name"
    done

# qemu would show this machine's, where torch misses what each ARM CPU says of itself.
printf 'processor\t: 0\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: 0xd08\n\n' \
    > "$root/proc/cpuinfo"

# Children, too, are started by this file, as Python takes it for its own.
cat > "$folder/python" << END
#!/bin/sh
export PYTHONPATH="$packages:\${PYTHONPATH:-}"
exec qemu-aarch64 -0 "$folder/python" -L "$root" "$root/usr/bin/$version" "\$@"
END
chmod +x "$folder/python"
"$folder/python" -c 'import torch'
echo "$wanted" > "$folder/made-of"
