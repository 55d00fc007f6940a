#include "base/power_loss_testing.h"

#include <fcntl.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <utility>

#include "absl/log/absl_check.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace ddp {
namespace {

std::string ParentOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash);
}

std::string NameOf(const std::string& path) { return path.substr(path.rfind('/') + 1); }

// A file or folder: what is durable, and what was done to it since.
struct Node {
  bool is_folder = false;
  // Of a file:
  std::string durable;
  std::string now;
  std::vector<std::pair<size_t, std::string>> writes = {};  // offset, bytes
  // Of a folder: each change takes effect as a whole. null: no such entry.
  using Entries = std::map<std::string, std::shared_ptr<Node>>;
  Entries durable_entries = {};
  Entries entries = {};
  std::vector<Entries> changes = {};

  static void Apply(const Entries& change, Entries& entries) {
    for (const auto& [name, node] : change) {
      if (node == nullptr) {
        entries.erase(name);
      } else {
        entries[name] = node;
      }
    }
  }
  void Change(const Entries& change) {
    Apply(change, entries);
    changes.push_back(change);
  }
  void Sync() {
    durable = now;
    writes.clear();
    durable_entries = entries;
    changes.clear();
  }
};

using NodePtr = std::shared_ptr<Node>;

NodePtr NewNode(bool is_folder) {
  NodePtr node = std::make_shared<Node>();
  node->is_folder = is_folder;
  return node;
}

class Disk {
 public:
  explicit Disk(const Tree& before) {
    for (const auto& [path, contents] : before) {
      NodePtr node = NewNode(!contents.has_value());
      if (contents.has_value()) node->now = *contents;
      Find(ParentOf(path))->Change({{NameOf(path), node}});
      node->Sync();
      Find(ParentOf(path))->Sync();
    }
  }

  void Do(const TracedCall& call) {
    const auto parent = [&] { return Find(ParentOf(call.path)); };
    const std::string name = NameOf(call.path);
    switch (call.kind) {
      case TracedCall::Kind::kOpen:
        if (call.creates && parent()->entries.count(name) == 0) {
          parent()->Change({{name, NewNode(false)}});
        }
        open_[call.handle] = Find(call.path);
        return;
      case TracedCall::Kind::kWrite: {
        Node& file = *open_.at(call.handle);
        file.writes.emplace_back(file.now.size(), call.data);
        file.now += call.data;
        return;
      }
      case TracedCall::Kind::kFsync:
        open_.at(call.handle)->Sync();
        return;
      case TracedCall::Kind::kRename:
        ABSL_CHECK_EQ(ParentOf(call.path), ParentOf(call.other)) << "atomic within one folder only";
        parent()->Change({{name, nullptr}, {NameOf(call.other), Find(call.path)}});
        return;
      case TracedCall::Kind::kExchange:
        ABSL_CHECK_EQ(ParentOf(call.path), ParentOf(call.other)) << "atomic within one folder only";
        parent()->Change({{name, Find(call.other)}, {NameOf(call.other), Find(call.path)}});
        return;
      case TracedCall::Kind::kMkdir:
        parent()->Change({{name, NewNode(true)}});
        return;
      case TracedCall::Kind::kUnlink:
      case TracedCall::Kind::kRmdir:
        parent()->Change({{name, nullptr}});
        return;
    }
  }

  Tree AfterPowerLoss(const Unsynced& unsynced) {
    random_.seed(unsynced.seed);
    kept_ = unsynced.kept;
    Tree tree;
    Collect(*root_, "", tree);
    return tree;
  }

 private:
  NodePtr Find(const std::string& path) const {
    NodePtr node = root_;
    size_t begin = 0;
    while (begin < path.size()) {
      const size_t end = std::min(path.find('/', begin), path.size());
      node = node->entries.at(path.substr(begin, end - begin));
      begin = end + 1;
    }
    return node;
  }

  bool Keeps() {
    return kept_ == Kept::kEverything || (kept_ == Kept::kSome && random_() % 2 == 0);
  }

  void Collect(const Node& folder, const std::string& prefix, Tree& tree) {
    Node::Entries entries = folder.durable_entries;
    for (const Node::Entries& change : folder.changes) {
      if (Keeps()) Node::Apply(change, entries);
    }
    for (const auto& [name, node] : entries) {
      const std::string path = absl::StrCat(prefix, name);
      if (node->is_folder) {
        tree[path] = std::nullopt;
        Collect(*node, path + "/", tree);
        continue;
      }
      std::string contents = node->durable;
      for (const auto& [offset, data] : node->writes) {
        if (!Keeps()) continue;
        const bool torn = kept_ == Kept::kSome && random_() % 4 == 0;
        const size_t size = torn ? random_() % (data.size() + 1) : data.size();
        if (contents.size() < offset + size) contents.resize(offset + size);
        contents.replace(offset, size, data, 0, size);
      }
      tree[path] = std::move(contents);
    }
  }

  NodePtr root_ = NewNode(true);
  std::map<int64_t, NodePtr> open_;
  std::mt19937 random_;
  Kept kept_ = Kept::kNothing;
};

}  // namespace

Tree ReadTree(const std::string& folder) {
  Tree tree;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    const std::string path = std::filesystem::relative(entry.path(), folder).string();
    if (entry.is_directory()) {
      tree[path] = std::nullopt;
    } else {
      const absl::StatusOr<std::string> contents = ReadFile(entry.path().string());
      ABSL_CHECK(contents.ok()) << contents.status();
      tree[path] = *contents;
    }
  }
  return tree;
}

void WriteTree(const Tree& tree, const std::string& folder) {
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  for (const auto& [path, contents] : tree) {
    const std::string full = absl::StrCat(folder, "/", path);
    if (contents.has_value()) {
      std::ofstream file(full, std::ios::binary);
      file << *contents;
      ABSL_CHECK(file.flush().good()) << full;
    } else {
      std::filesystem::create_directory(full);
    }
  }
}

std::optional<std::string> RecordingFileSystem::Below(const char* path) const {
  absl::string_view rest = path;
  if (!absl::ConsumePrefix(&rest, folder_)) return std::nullopt;
  if (rest.empty()) return "";
  if (!absl::ConsumePrefix(&rest, "/")) return std::nullopt;
  return std::string(rest);
}

void RecordingFileSystem::Record(TracedCall::Kind kind, const char* path) {
  if (std::optional<std::string> below = Below(path)) {
    trace_.push_back({.kind = kind, .path = *std::move(below)});
  }
}

int RecordingFileSystem::Open(const char* path, int flags, mode_t mode) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int fd = FileSystem::Open(path, flags, mode);
  const std::optional<std::string> below = Below(path);
  if (fd < 0 || !below.has_value()) return fd;
  ABSL_CHECK_EQ(flags & (O_TRUNC | O_APPEND | O_RDWR), 0) << "not part of the model";
  handles_[fd] = next_handle_++;
  trace_.push_back({.kind = TracedCall::Kind::kOpen,
                    .path = *below,
                    .handle = handles_[fd],
                    .creates = (flags & O_CREAT) != 0});
  return fd;
}

ssize_t RecordingFileSystem::Write(int fd, const void* data, size_t size) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const ssize_t written = FileSystem::Write(fd, data, size);
  const auto handle = handles_.find(fd);
  if (written > 0 && handle != handles_.end()) {
    trace_.push_back(
        {.kind = TracedCall::Kind::kWrite,
         .handle = handle->second,
         .data = std::string(static_cast<const char*>(data), static_cast<size_t>(written))});
  }
  return written;
}

int RecordingFileSystem::Fsync(int fd) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto handle = handles_.find(fd);
  if (handle == handles_.end()) return FileSystem::Fsync(fd);
  // Nothing is asked of the real disk: the power stays on in the test.
  if (++fsyncs_ != ignored_fsync_) {
    trace_.push_back({.kind = TracedCall::Kind::kFsync, .handle = handle->second});
  }
  return 0;
}

int RecordingFileSystem::Close(int fd) {
  const std::lock_guard<std::mutex> lock(mutex_);
  handles_.erase(fd);
  return FileSystem::Close(fd);
}

int RecordingFileSystem::Rename(const char* from, const char* to) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int result = FileSystem::Rename(from, to);
  if (result == 0) {
    Record(TracedCall::Kind::kRename, from);
    if (Below(from).has_value()) trace_.back().other = Below(to).value();
  }
  return result;
}

int RecordingFileSystem::Exchange(const char* a, const char* b) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int result = FileSystem::Exchange(a, b);
  if (result == 0) {
    Record(TracedCall::Kind::kExchange, a);
    if (Below(a).has_value()) trace_.back().other = Below(b).value();
  }
  return result;
}

int RecordingFileSystem::Unlink(const char* path) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int result = FileSystem::Unlink(path);
  if (result == 0) Record(TracedCall::Kind::kUnlink, path);
  return result;
}

int RecordingFileSystem::Mkdir(const char* path, mode_t mode) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int result = FileSystem::Mkdir(path, mode);
  if (result == 0) Record(TracedCall::Kind::kMkdir, path);
  return result;
}

int RecordingFileSystem::Rmdir(const char* path) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int result = FileSystem::Rmdir(path);
  if (result == 0) Record(TracedCall::Kind::kRmdir, path);
  return result;
}

Tree AfterPowerLoss(const Tree& before, const std::vector<TracedCall>& trace, size_t calls,
                    const Unsynced& unsynced) {
  Disk disk(before);
  for (size_t i = 0; i < calls; ++i) disk.Do(trace[i]);
  return disk.AfterPowerLoss(unsynced);
}

}  // namespace ddp
