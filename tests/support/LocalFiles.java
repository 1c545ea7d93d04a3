package dagster_ckpt.tests;

import java.io.IOException;
import java.net.URI;
import java.net.URISyntaxException;
import java.nio.file.Files;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.ChecksumFs;
import org.apache.hadoop.fs.DelegateToFileSystem;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.LocalFileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RawLocalFileSystem;
import org.apache.hadoop.fs.permission.FsPermission;

/** Hadoop's local file system, except that it asks the JVM where Hadoop starts a `chmod` or `readlink` for a file. */
public class LocalFiles extends LocalFileSystem {
    public LocalFiles() {
        super(new Raw());
    }

    static class Raw extends RawLocalFileSystem {
        public void setPermission(Path path, FsPermission permission) throws IOException {
            Files.setAttribute(pathToFile(path).toPath(), "unix:mode", Integer.valueOf(permission.toShort()));
        }

        public FileStatus getFileLinkStatus(Path path) throws IOException {
            boolean link = Files.isSymbolicLink(pathToFile(path).toPath());
            return link ? super.getFileLinkStatus(path) : getFileStatus(path);
        }
    }

    /** The same for Hadoop's `FileContext`, by which Spark writes its checkpoints. */
    public static class Context extends ChecksumFs {
        public Context(URI uri, Configuration settings) throws IOException, URISyntaxException {
            super(new RawContext(uri, settings));
        }
    }

    static class RawContext extends DelegateToFileSystem {
        RawContext(URI uri, Configuration settings) throws IOException, URISyntaxException {
            super(uri, new Raw(), settings, "file", false);
        }

        public int getUriDefaultPort() {
            return -1;
        }

        public boolean isValidName(String name) {
            return true;
        }
    }
}
